def test_x(lane):
    import time
    t=time.time(); lane.start(); print("start", time.time()-t)
    print(lane.get("/v1/status").json)
    t=time.time(); lane.answered("hi"); print(time.time()-t)
    print(lane.brainctl("status").stdout, lane.starts(), lane.main_pid())
    print(lane.said())
    job=lane.call_in_flight()
    lane.brain.release()
    print(lane.has_moved(job["id"],"done"))
