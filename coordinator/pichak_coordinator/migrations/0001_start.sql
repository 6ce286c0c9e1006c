-- Times are Unix seconds of the coordinator's clock. JSON columns hold objects or lists.

CREATE TABLE runs (
    seq INTEGER PRIMARY KEY,
    run TEXT NOT NULL UNIQUE,
    started_unix REAL NOT NULL,
    finished_unix REAL,
    command TEXT NOT NULL,
    settings_json TEXT NOT NULL
);

-- A node by its stable identity, as it was last seen.
CREATE TABLE nodes (
    node TEXT PRIMARY KEY,
    machine TEXT NOT NULL,
    gpu_uuids_json TEXT NOT NULL,
    host TEXT NOT NULL,
    address TEXT NOT NULL,
    first_seen_unix REAL NOT NULL,
    last_seen_unix REAL NOT NULL
) WITHOUT ROWID;

CREATE INDEX nodes_by_machine ON nodes (machine, last_seen_unix);
CREATE INDEX nodes_by_address ON nodes (address, last_seen_unix);

-- What a node said of itself in one run, or why it said nothing.
CREATE TABLE run_nodes (
    run TEXT NOT NULL REFERENCES runs (run),
    node TEXT NOT NULL REFERENCES nodes (node),
    position INTEGER NOT NULL,
    hello_json TEXT NOT NULL,
    error TEXT NOT NULL,
    PRIMARY KEY (run, node)
) WITHOUT ROWID;

CREATE INDEX run_nodes_by_node ON run_nodes (node, run);

-- run is NULL for a job that this store did not send: its outcome was kept all the same.
CREATE TABLE jobs (
    job_id TEXT PRIMARY KEY,
    run TEXT REFERENCES runs (run),
    node TEXT NOT NULL,
    device TEXT NOT NULL,
    kind TEXT NOT NULL,
    state TEXT NOT NULL,
    attempts INTEGER NOT NULL,
    error TEXT NOT NULL,
    params_json TEXT NOT NULL,
    changed_unix REAL NOT NULL
) WITHOUT ROWID;

CREATE INDEX jobs_by_run ON jobs (run, node);

-- The bytes that the node produced, unchanged. The key is what makes them arrive exactly once.
CREATE TABLE outcomes (
    job_id TEXT NOT NULL REFERENCES jobs (job_id),
    attempt INTEGER NOT NULL,
    node TEXT NOT NULL,
    status TEXT NOT NULL,
    simulated INTEGER NOT NULL,
    received_unix REAL NOT NULL,
    data BLOB NOT NULL,
    PRIMARY KEY (job_id, attempt)
);

-- One reading a row. Exactly one of value, text and unmeasured is set. gpu_uuid is '' where there
-- is none: "cuda:1" may be another card in each run. Written once with their outcome, whose key
-- keeps them single.
CREATE TABLE metrics (
    node TEXT NOT NULL,
    metric TEXT NOT NULL,
    received_unix REAL NOT NULL,
    job_id TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    run TEXT,
    device TEXT NOT NULL,
    gpu_uuid TEXT NOT NULL,
    value REAL,
    text TEXT,
    unmeasured TEXT,
    unit TEXT NOT NULL,
    spread REAL,
    samples INTEGER NOT NULL,
    suspect TEXT NOT NULL,
    source TEXT NOT NULL,
    CHECK ((value IS NOT NULL) + (text IS NOT NULL) + (unmeasured IS NOT NULL) = 1)
);

CREATE INDEX metrics_by_node ON metrics (node, metric);

CREATE TABLE plans (
    run TEXT NOT NULL REFERENCES runs (run),
    node TEXT NOT NULL,
    device TEXT NOT NULL,
    plan_json TEXT NOT NULL,
    PRIMARY KEY (run, node, device)
) WITHOUT ROWID;

CREATE TABLE findings (
    run TEXT NOT NULL REFERENCES runs (run),
    node TEXT NOT NULL,
    device TEXT NOT NULL,
    code TEXT NOT NULL,
    metric TEXT NOT NULL,
    severity TEXT NOT NULL,
    state TEXT NOT NULL,
    confidence TEXT NOT NULL,
    sentence TEXT NOT NULL,
    evidence_json TEXT NOT NULL,
    PRIMARY KEY (run, node, device, code, metric)
) WITHOUT ROWID;
