-- The lane's whole memory. Times are RFC 3339 text in UTC with microseconds, so that text order is time order; ids are
-- never used again. Prompts and answers stand in tables of their own: a move of a job rewrites a short row, and a list
-- never reads them.

create table jobs (
    id integer primary key autoincrement,
    key text,
    digest text not null,                           -- of request, route and the model that the job itself named
    submitter_uid integer not null,
    submitter_name text,
    submitter_pid integer,
    route text not null,
    model text,                                     -- asked for last; of a job that named none: its route's at that time
    names_model integer not null check (names_model in (0, 1)),
    status text not null
        check (status in ('queued', 'running', 'held', 'done', 'failed', 'cancelled')),
    reason text not null
        check (reason in ('submitted', 'claimed', 'answered', 'not-sent', 'not-executed', 'asked-to-wait',
            'route-refused', 'upstream-error', 'asked-again', 'sent-outcome-unknown', 'answer-incomplete',
            'answer-unreadable', 'answer-truncated', 'crashed-worker', 'evidence-contradicts', 'refused-repeatedly',
            'attempts-exhausted', 'filtered', 'empty-output', 'bad-request', 'cancel-requested', 'operator-resent',
            'operator-accepted', 'operator-completed', 'operator-failed', 'operator-cancelled', 'operator-retried')),
    detail text not null default '',                -- one sentence that quotes the evidence of the last move
    moved_at text not null,
    priority text not null check (priority in ('low', 'normal', 'high')),
    max_attempts integer not null check (max_attempts > 0),
    extra_attempts integer not null default 0,      -- what people allowed later
    attempts_used integer not null default 0,
    attempt_count integer not null default 0,       -- the number of the latest attempt
    unclean_deaths integer not null default 0,      -- counted at the claim, taken back when an outcome is recorded
    strikes integer not null default 0,             -- times in a row that the brain asked this job to wait
    may_run_twice integer not null check (may_run_twice in (0, 1)),
    require_complete integer not null check (require_complete in (0, 1)),
    request_bytes integer not null,
    created_at text not null,
    not_before text,
    place_at text not null,                         -- the place in line, kept for life
    due_at text,                                    -- null: may run now
    started_at text,
    finished_at text,
    cancel_requested_at text,
    erased_at text,                                 -- prompt and answer are gone since; the record stays
    finish_reason text,
    flags text not null default '[]' check (json_valid(flags)),
    usage text check (usage is null or json_valid(usage)),
    check ((status in ('done', 'failed', 'cancelled')) = (finished_at is not null)),
    check (status <> 'running' or (started_at is not null and attempt_count > 0)),
    check (status = 'queued' or due_at is null),
    check (erased_at is null or finished_at is not null)
) strict;

-- The schema itself forbids a second running job.
create unique index one_running_job on jobs (status) where status = 'running';
create unique index one_job_for_a_key on jobs (submitter_uid, key) where key is not null;
-- The head of each route: found at once in a table of any size.
create index line on jobs (route, place_at, id) where status = 'queued' and due_at is null;
create index due on jobs (due_at) where status = 'queued' and due_at is not null;
create index suspects on jobs (route) where status = 'queued' and strikes >= 3;
create index acceptance on jobs (created_at) where status = 'queued';
create index by_status on jobs (status, id);
create index finished on jobs (finished_at) where finished_at is not null;
create index with_payload on jobs (finished_at) where finished_at is not null and erased_at is null;
create index by_submitter on jobs (submitter_uid, id);
create index by_route on jobs (route, id);
create index by_time on jobs (created_at);

create table job_attempts (
    job_id integer not null references jobs (id) on delete cascade,
    attempt integer not null check (attempt > 0),
    run text not null,                              -- the start of the daemon that made it (table runs)
    status text not null
        check (status in ('running', 'succeeded', 'failed', 'interrupted', 'unknown', 'cancelled')),
    reason text,
    detail text not null default '',
    route text not null,
    model text,
    endpoint text,
    may_run_twice integer not null check (may_run_twice in (0, 1)), -- the leave to ask again, given before anything was sent
    started_at text not null,
    armed_at text,                                  -- committed before a byte can leave: null proves that none did
    sent_at text,
    send_failed_at text,
    headers_at text,
    http_status integer,
    exit_status integer,                            -- of a local command; negative for a signal
    upstream_id text,
    first_byte_at text,
    ended_at text,
    uses_attempt integer not null default 1 check (uses_attempt in (0, 1)),
    finish_reason text,
    flags text not null default '[]' check (json_valid(flags)),
    usage text check (usage is null or json_valid(usage)),
    primary key (job_id, attempt),
    check ((status = 'running') = (ended_at is null)),
    check (status <> 'interrupted' or armed_at is null or send_failed_at is not null)
) strict, without rowid;

create unique index one_running_attempt on job_attempts (status) where status = 'running';

create table job_labels (
    job_id integer not null references jobs (id) on delete cascade,
    key text not null,
    value text not null,
    primary key (job_id, key)
) strict, without rowid;

create index by_label on job_labels (key, value, job_id);

create table job_requests (
    job_id integer primary key references jobs (id) on delete cascade,
    request text not null
) strict;

-- What the submitter gets.
create table job_outputs (
    job_id integer primary key references jobs (id) on delete cascade,
    text text not null,
    response text                                   -- the completion object, "" where the text belongs
) strict;

-- What an attempt brought that was not (or not yet) taken as the output.
create table attempt_parts (
    job_id integer not null,
    attempt integer not null,
    text text not null,
    response text,
    raw blob,
    primary key (job_id, attempt),
    foreign key (job_id, attempt) references job_attempts (job_id, attempt) on delete cascade
) strict;

-- Who decided what about a job, and on which attempt the decision was based.
create table decisions (
    id integer primary key autoincrement,
    job_id integer not null references jobs (id) on delete cascade,
    attempt integer not null,
    action text not null check (action in ('resend', 'accept', 'complete', 'fail', 'cancel', 'retry', 'forget')),
    reason text,
    at text not null,
    uid integer not null,
    user_name text,
    pid integer
) strict;

create index decisions_of_a_job on decisions (job_id);

-- One row: what concerns the lane as a whole.
create table lane (
    id integer primary key check (id = 1),
    client text not null default 'brainctl',        -- how the commands of next_action begin
    paused_at text,
    paused_by text,
    paused_reason text,
    disk_low_since text
) strict;

insert into lane (id) values (1);

-- The routes of the configuration, written at every start, and the doors that are closed.
create table gates (
    route text primary key,
    configured integer not null check (configured in (0, 1)),
    reason text,
    detail text,
    closed_at text,
    next_probe_at text,                             -- null while closed: only the operator opens it
    refusals integer not null default 0,
    check ((closed_at is null) = (reason is null))
) strict;

-- Every start of the daemon, and how it ended.
create table runs (
    run text primary key,
    invocation text,                                -- systemd's id of the start, where it made one
    pid integer,                                    -- null: it ended before it could say
    version text not null,
    started_at text not null,
    ended_at text,
    ending text
) strict;

create table job_counts (
    route text not null,
    status text not null,
    jobs integer not null,
    primary key (route, status)
) strict, without rowid;

create trigger count_inserted after insert on jobs begin
    insert into job_counts (route, status, jobs) values (new.route, new.status, 1)
        on conflict do update set jobs = jobs + 1;
end;

create trigger count_moved after update of status on jobs when old.status <> new.status begin
    update job_counts set jobs = jobs - 1 where route = old.route and status = old.status;
    insert into job_counts (route, status, jobs) values (new.route, new.status, 1)
        on conflict do update set jobs = jobs + 1;
end;

create trigger count_deleted after delete on jobs begin
    update job_counts set jobs = jobs - 1 where route = old.route and status = old.status;
end;

-- The one place that derives why a queued job waits and what a person may safely do next. Pausing rewrites no row.
create view operator_view as
select
    jobs.id,
    jobs.status,
    jobs.reason,
    case when jobs.status = 'queued' then
        case
            when lane.paused_at is not null then 'lane-paused'
            when lane.disk_low_since is not null then 'disk-reserve'
            when coalesce(gates.configured, 0) = 0 then 'route-missing'
            when jobs.due_at > strftime('%Y-%m-%dT%H:%M:%fZ', 'now') then
                case when jobs.due_at = jobs.not_before then 'not-before' else 'retry-wait' end
            when gates.closed_at is not null then 'route-gated'
            else 'waiting-turn'
        end
    end as waiting,
    jobs.moved_at as since,
    round((julianday('now') - julianday(jobs.moved_at)) * 86400, 3) as age_s,
    jobs.attempt_count as attempts,
    jobs.route,
    lane.client || case jobs.status
        when 'done' then case when jobs.erased_at is null then ' output ' else ' show ' end || jobs.id
        when 'held' then ' recover ' || jobs.id
        when 'running' then ' follow ' || jobs.id
        when 'queued' then
            case
                when lane.paused_at is not null then ' resume'
                when gates.closed_at is not null and gates.next_probe_at is null
                    then ' resume --route ' || jobs.route
                else ' wait ' || jobs.id
            end
        else ' show ' || jobs.id
    end as next_action
from jobs
cross join lane
left join gates on gates.route = jobs.route;
