-- The readings of an outcome lie side by side, and what they have in common is stored once. The
-- view `metrics` shows them as the table of that name did: one reading a row.

-- An outcome that has readings.
CREATE TABLE reading_sets (
    id INTEGER PRIMARY KEY,
    node TEXT NOT NULL,
    received_unix REAL NOT NULL,
    job_id TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    run TEXT,
    device TEXT NOT NULL,
    gpu_uuid TEXT NOT NULL
);

CREATE TABLE reading_names (
    id INTEGER PRIMARY KEY,
    metric TEXT NOT NULL,
    unit TEXT NOT NULL,
    UNIQUE (metric, unit)
);

-- Exactly one of value, text and unmeasured is set. id is the set's times 65,536 and its place in
-- the set: an outcome has at most 10,000.
CREATE TABLE readings (
    id INTEGER PRIMARY KEY,
    name INTEGER NOT NULL,
    value REAL,
    text TEXT,
    unmeasured TEXT,
    spread REAL,
    samples INTEGER NOT NULL,
    suspect TEXT NOT NULL,
    source TEXT NOT NULL,
    CHECK ((value IS NOT NULL) + (text IS NOT NULL) + (unmeasured IS NOT NULL) = 1)
);

INSERT INTO reading_sets (node, received_unix, job_id, attempt, run, device, gpu_uuid)
SELECT node, received_unix, job_id, attempt, run, device, gpu_uuid FROM metrics
GROUP BY job_id, attempt ORDER BY min(rowid);

CREATE INDEX reading_sets_by_node ON reading_sets (node);
CREATE INDEX reading_sets_by_job ON reading_sets (job_id);

INSERT INTO reading_names (metric, unit) SELECT DISTINCT metric, unit FROM metrics;

INSERT INTO readings (id, name, value, text, unmeasured, spread, samples, suspect, source)
SELECT
    s.id * 65536 + row_number() OVER (PARTITION BY s.id ORDER BY m.rowid) - 1,
    n.id, m.value, m.text, m.unmeasured, m.spread, m.samples, m.suspect, m.source
FROM metrics m
JOIN reading_sets s ON s.job_id = m.job_id AND s.attempt = m.attempt
JOIN reading_names n ON n.metric = m.metric AND n.unit = m.unit;

DROP TABLE metrics;

CREATE VIEW metrics AS
SELECT
    s.node, n.metric, s.received_unix, s.job_id, s.attempt, s.run, s.device, s.gpu_uuid,
    r.value, r.text, r.unmeasured, n.unit, r.spread, r.samples, r.suspect, r.source
FROM reading_sets s
CROSS JOIN readings r ON r.id BETWEEN s.id * 65536 AND s.id * 65536 + 65535
CROSS JOIN reading_names n ON n.id = r.name;
