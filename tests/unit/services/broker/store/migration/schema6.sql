-- A ledger of schema 6, as the release that had it left it: two groups, one of them in a batch.
PRAGMA user_version = 6;
BEGIN TRANSACTION;
CREATE TABLE additions (
    number INTEGER PRIMARY KEY, source TEXT NOT NULL, name TEXT NOT NULL, digest TEXT NOT NULL, first_task INTEGER NOT NULL,
    num_tasks INTEGER NOT NULL, at_draw INTEGER NOT NULL, checksum INTEGER NOT NULL
);
CREATE TABLE archived (
    group_id INTEGER PRIMARY KEY, archive INTEGER NOT NULL, place INTEGER NOT NULL, checksum INTEGER NOT NULL
);
CREATE TABLE archives (
    archive INTEGER PRIMARY KEY, name TEXT NOT NULL, num_bytes INTEGER NOT NULL, sha256 TEXT NOT NULL,
    num_groups INTEGER NOT NULL, num_trajectories INTEGER NOT NULL, num_tokens INTEGER NOT NULL, first_batch INTEGER,
    last_batch INTEGER, checksum INTEGER NOT NULL
);
CREATE TABLE batches (
    batch INTEGER PRIMARY KEY, policy_version INTEGER NOT NULL, group_ids TEXT NOT NULL, stats TEXT NOT NULL,
    samplings TEXT NOT NULL, vals TEXT NOT NULL, checksum INTEGER NOT NULL
);
INSERT INTO "batches" VALUES(0,1,'[0]','{"num_groups": 1, "num_trajectories": 1, "num_tokens": 12, "num_action_tokens": 8, "mean_reward": 0.5, "mean_lag": 0.0, "max_lag": 0, "num_zero_variance_groups": 0, "components": {}, "lengths": null, "num_left_out_groups": 0, "num_left_out_tokens": 0, "pass_rates": {}}','[[0.7, 16, 99, 99, 1.0, -1]]','{"learning_rate": null, "eps_low": null, "eps_high": null}',1123684335);
CREATE TABLE checkpointed (
    id INTEGER NOT NULL DEFAULT 0 UNIQUE CHECK (id = 0), next_batch INTEGER NOT NULL, checksum INTEGER NOT NULL
);
INSERT INTO "checkpointed" VALUES(0,0,3617669607);
CREATE TABLE chunks (
    trajectory_id INTEGER NOT NULL, start INTEGER NOT NULL, epoch INTEGER NOT NULL, num_tokens INTEGER NOT NULL,
    header BLOB NOT NULL, token_ids BLOB NOT NULL, logprobs BLOB NOT NULL, checksum INTEGER NOT NULL
);
INSERT INTO "chunks" VALUES(0,0,1,4,X'959193AB6F62736572766174696F6E00049192010481A47475726E00C290',X'00000000010000000200000003000000',X'00000080000000BE000080BE0000C0BE',1554050009);
INSERT INTO "chunks" VALUES(0,4,1,8,X'959193A6616374696F6E00089192010881A47475726E04C391CB3FE0000000000000',X'0400000005000000060000000700000008000000090000000A0000000B000000',X'000000BF000020BF000040BF000060BF000080BF000090BF0000A0BF0000B0BF',1319641968);
INSERT INTO "chunks" VALUES(1,0,1,4,X'959193AB6F62736572766174696F6E00049192010481A47475726E00C290',X'00000000010000000200000003000000',X'00000080000000BE000080BE0000C0BE',2309330853);
CREATE TABLE commits (
    slot INTEGER PRIMARY KEY, number INTEGER NOT NULL, digest TEXT NOT NULL, chunks INTEGER NOT NULL,
    tokens INTEGER NOT NULL, batches INTEGER NOT NULL, records INTEGER NOT NULL, checksum INTEGER NOT NULL
);
INSERT INTO "commits" VALUES(0,0,'1c6616224336f5d2ea1e55c74768eac0',0,0,0,0,644428068);
INSERT INTO "commits" VALUES(1,1,'7ad84ad59666d845bb0fb5827d595dce',0,0,0,0,2474549226);
INSERT INTO "commits" VALUES(2,2,'cec77e616cfa0b95db209683406f420d',3,16,0,1,3052084028);
INSERT INTO "commits" VALUES(3,3,'c0b23ed0189e893e54e06f68faf4dcfc',3,16,1,1,1832191012);
CREATE TABLE evaluations (
    evaluation_id INTEGER PRIMARY KEY, policy_version INTEGER NOT NULL, batch INTEGER NOT NULL,
    num_tasks INTEGER NOT NULL, status TEXT NOT NULL, reward REAL, num_finished INTEGER NOT NULL,
    num_failed INTEGER NOT NULL, name TEXT NOT NULL, samples INTEGER NOT NULL, score REAL, checksum INTEGER NOT NULL
);
CREATE TABLE failures (
    batch INTEGER PRIMARY KEY, reported INTEGER NOT NULL, silent INTEGER NOT NULL, session TEXT NOT NULL,
    reason TEXT NOT NULL, checksum INTEGER NOT NULL
);
CREATE TABLE groups (
    group_id INTEGER PRIMARY KEY, split TEXT NOT NULL, prompt INTEGER NOT NULL, task_index INTEGER NOT NULL,
    evaluation INTEGER, status TEXT NOT NULL, sampling TEXT NOT NULL, batch INTEGER, drop_reason TEXT, replaces INTEGER,
    checksum INTEGER NOT NULL
);
INSERT INTO "groups" VALUES(0,'train',0,7,NULL,'batched','[0.7, 16, 99, 99, 1.0, -1]',0,NULL,NULL,2234336499);
INSERT INTO "groups" VALUES(1,'train',1,8,NULL,'open','[0.7, 16, 99, 99, 1.0, -1]',NULL,NULL,NULL,3633695104);
CREATE TABLE journal (
    trajectory_id INTEGER NOT NULL, place INTEGER NOT NULL, entry BLOB NOT NULL, checksum INTEGER NOT NULL,
    PRIMARY KEY (trajectory_id, place)
) WITHOUT ROWID;
CREATE TABLE losses (loss INTEGER PRIMARY KEY, line TEXT NOT NULL, checksum INTEGER NOT NULL);
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL, checksum INTEGER NOT NULL) WITHOUT ROWID;
INSERT INTO "meta" VALUES('fingerprint','f',3520998988);
INSERT INTO "meta" VALUES('run','{"failures_in_a_row":0,"stop_reason":"","error":"","learner_peer":"learner","learner_session":"","learner_batch":null}',3866137521);
INSERT INTO "meta" VALUES('run_id','first',1004709170);
CREATE TABLE records (record INTEGER PRIMARY KEY, line TEXT NOT NULL, checksum INTEGER NOT NULL);
INSERT INTO "records" VALUES(1,'{"event": "batch", "time_s": 1.5, "batch": 0}',2780103359);
CREATE TABLE set_aside (
    batch INTEGER PRIMARY KEY, policy_version INTEGER NOT NULL, reason TEXT NOT NULL, checksum INTEGER NOT NULL
);
CREATE TABLE tasks (
    task_index INTEGER PRIMARY KEY, num_silent INTEGER NOT NULL, rests_until INTEGER NOT NULL, checksum INTEGER NOT NULL
);
CREATE TABLE trained (
    batch INTEGER NOT NULL, policy_version INTEGER NOT NULL, how TEXT NOT NULL, checksum INTEGER NOT NULL,
    PRIMARY KEY (batch, policy_version)
) WITHOUT ROWID;
CREATE TABLE trajectories (
    trajectory_id INTEGER PRIMARY KEY, group_id INTEGER NOT NULL, status TEXT NOT NULL, epoch INTEGER NOT NULL,
    holder_peer TEXT NOT NULL, holder_session TEXT NOT NULL, lease_version INTEGER NOT NULL, lease_start INTEGER NOT NULL,
    attempts INTEGER NOT NULL, num_tokens INTEGER NOT NULL, num_action_tokens INTEGER NOT NULL,
    version_sum INTEGER NOT NULL, min_version INTEGER NOT NULL, num_turns INTEGER NOT NULL, num_segments INTEGER NOT NULL,
    num_runs INTEGER NOT NULL, last_version INTEGER NOT NULL, last_sequence INTEGER NOT NULL, sequences TEXT NOT NULL,
    num_entries INTEGER NOT NULL, journal_bytes INTEGER NOT NULL, reward_size REAL NOT NULL, finish_reason TEXT,
    turn_rewards TEXT NOT NULL, discarded_turns TEXT NOT NULL, components TEXT NOT NULL, checksum INTEGER NOT NULL
);
INSERT INTO "trajectories" VALUES(0,0,'finished',1,'rollout-0','s',1,0,0,12,8,8,1,1,2,2,1,0,'[]',0,0,0.5,'done','[0.5]','[]','{}',2607493167);
INSERT INTO "trajectories" VALUES(1,1,'leased',1,'rollout-0','s',1,0,0,4,0,0,0,0,1,1,1,0,'[]',0,0,0.0,NULL,'[]','[]','{}',1506098630);
CREATE TABLE versions (
    policy_version INTEGER PRIMARY KEY, endpoint TEXT NOT NULL, digest TEXT NOT NULL, num_bytes INTEGER NOT NULL,
    trained_batches INTEGER NOT NULL, vocabulary INTEGER NOT NULL, checksum INTEGER NOT NULL
);
INSERT INTO "versions" VALUES(1,'tcp://x:1','d',9,0,300,2861979870);
CREATE UNIQUE INDEX chunks_in_order ON chunks (trajectory_id, start);
CREATE INDEX trajectories_by_group ON trajectories (group_id);
CREATE INDEX groups_by_status ON groups (status);
COMMIT;
