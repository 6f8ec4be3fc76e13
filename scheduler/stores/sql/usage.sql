-- name: record
INSERT INTO usage (pool, unit, calendar, start, until, used)
VALUES (:pool, :unit, :calendar, :start, :until, :used)
ON CONFLICT (pool, unit, calendar, start) DO UPDATE SET used = excluded.used, until = excluded.until;

-- name: standing
SELECT pool, unit, calendar, start, until, used FROM usage WHERE until > :now;

-- name: prune
DELETE FROM usage WHERE until <= :before;
