/* A disk that is slow to sync: every fsync, fdatasync and sync_file_range first sleeps SLOWSYNC_US microseconds.
   Built by tests/bench/machine.py and preloaded into the process that is measured. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <time.h>

static void wait_for_the_disk(void)
{
    static long microseconds = -1;
    struct timespec pause;

    if (microseconds < 0) {
        const char *text = getenv("SLOWSYNC_US");
        microseconds = text ? atol(text) : 0;
    }
    pause.tv_sec = microseconds / 1000000;
    pause.tv_nsec = microseconds % 1000000 * 1000;
    nanosleep(&pause, NULL);
}

int fsync(int descriptor)
{
    static int (*real)(int);
    if (!real)
        real = (int (*)(int))dlsym(RTLD_NEXT, "fsync");
    wait_for_the_disk();
    return real(descriptor);
}

int fdatasync(int descriptor)
{
    static int (*real)(int);
    if (!real)
        real = (int (*)(int))dlsym(RTLD_NEXT, "fdatasync");
    wait_for_the_disk();
    return real(descriptor);
}

int sync_file_range(int descriptor, off64_t offset, off64_t length, unsigned int flags)
{
    static int (*real)(int, off64_t, off64_t, unsigned int);
    if (!real)
        real = (int (*)(int, off64_t, off64_t, unsigned int))dlsym(RTLD_NEXT, "sync_file_range");
    wait_for_the_disk();
    return real(descriptor, offset, length, flags);
}
