-- What `pichak fleet watch` must remember to go on after any end.

-- One row: when a watch last looked at its schedule, and who holds the watch.
CREATE TABLE watch_state (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    looked_unix REAL,
    holder TEXT NOT NULL
);

-- A node's schedule.
CREATE TABLE watch_nodes (
    node TEXT PRIMARY KEY,
    entry_json TEXT NOT NULL
) WITHOUT ROWID;

-- What is held against a device's next probe: the readings that stand for "before", and what is
-- open. `device` is the GPU's UUID where it has one, else its name.
CREATE TABLE watch_devices (
    node TEXT NOT NULL,
    device TEXT NOT NULL,
    memory_json TEXT NOT NULL,
    PRIMARY KEY (node, device)
) WITHOUT ROWID;

-- Probe-seconds: the most a probe may take until it has ended, then what it took.
CREATE TABLE watch_charges (
    probe TEXT PRIMARY KEY,
    started_unix REAL NOT NULL,
    seconds REAL NOT NULL
) WITHOUT ROWID;

-- What was told, and how far the webhook is with it: '' (not wanted), 'pending', 'sent', 'given up'.
CREATE TABLE watch_events (
    seq INTEGER PRIMARY KEY,
    event TEXT NOT NULL UNIQUE,
    created_unix REAL NOT NULL,
    body TEXT NOT NULL,
    delivery TEXT NOT NULL,
    attempts INTEGER NOT NULL,
    next_try_unix REAL NOT NULL,
    error TEXT NOT NULL
);

CREATE INDEX watch_events_pending ON watch_events (next_try_unix) WHERE delivery = 'pending';
