-- name: by_key
SELECT * FROM effect WHERE key = :key;

-- name: totals
SELECT rows, bytes FROM effect_total;

-- name: reserve
INSERT INTO effect (key, owner, agent, tenant, tool, kind, digest, call, state, epoch, reserved,
  deadline, keep)
VALUES (:key, :owner, :agent, :tenant, :tool, :kind, :digest, :call, 'reserved', :epoch, :now,
  :deadline, :keep);

-- name: drop
DELETE FROM effect WHERE key = :key;

-- name: extend
UPDATE effect SET deadline = :deadline WHERE key = :key AND epoch = :epoch AND state = 'reserved';

-- name: settle
UPDATE effect SET state = 'settled', settled = :now, expires = :now + keep, result = :result,
  bytes = :bytes, tokens = :tokens, note = :note
WHERE key = :key AND epoch = :epoch AND state IN ('reserved', 'in_doubt');

-- name: release
DELETE FROM effect WHERE key = :key AND epoch = :epoch AND state = 'reserved';

-- name: doubt
UPDATE effect SET state = 'in_doubt', note = :note
WHERE key = :key AND epoch = :epoch AND state = 'reserved';

-- name: overdue
SELECT * FROM effect WHERE state = 'reserved' AND deadline <= :now ORDER BY deadline LIMIT :limit;

-- name: reserved
SELECT * FROM effect WHERE state = 'reserved' AND reserved < :before ORDER BY reserved;

-- name: doubts
SELECT * FROM effect WHERE state = 'in_doubt' ORDER BY reserved LIMIT :limit;

-- name: prune
DELETE FROM effect WHERE key IN (
  SELECT key FROM effect WHERE state = 'settled' AND expires <= :now ORDER BY expires LIMIT :limit);

-- name: counts
SELECT state, count(*) FROM effect GROUP BY state;
