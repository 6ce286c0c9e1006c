-- Readings are in the outcomes' bytes, whole. Beside them lie only the numbers that later readings
-- are judged by, those of one outcome together: a row for each reading was most of what storing an
-- outcome cost, and of what the file held.

-- An outcome that has readings. numbers_json holds metric -> value of those that are numbers and
-- not suspect.
CREATE TABLE outcome_numbers (
    id INTEGER PRIMARY KEY,
    node TEXT NOT NULL,
    received_unix REAL NOT NULL,
    job_id TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    run TEXT,
    device TEXT NOT NULL,
    gpu_uuid TEXT NOT NULL,
    numbers_json TEXT NOT NULL
);

-- printf: SQLite's own JSON of a number has only 15 digits.
INSERT INTO outcome_numbers
SELECT
    id, node, received_unix, job_id, attempt, run, device, gpu_uuid,
    (
        SELECT json_group_object(n.metric, json(printf('%!.17g', r.value)))
        FROM readings r JOIN reading_names n ON n.id = r.name
        WHERE r.id BETWEEN s.id * 65536 AND s.id * 65536 + 65535
        AND r.value IS NOT NULL AND r.suspect = ''
    )
FROM reading_sets s;

CREATE INDEX outcome_numbers_by_node ON outcome_numbers (node);
CREATE INDEX outcome_numbers_by_job ON outcome_numbers (job_id);

DROP VIEW metrics;
DROP TABLE readings;
DROP TABLE reading_names;
DROP TABLE reading_sets;
