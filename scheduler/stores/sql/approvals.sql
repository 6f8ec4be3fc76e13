-- name: by_id
SELECT * FROM approval WHERE id = :id;

-- name: newest
SELECT * FROM approval WHERE binding = :binding ORDER BY seq DESC LIMIT 1;

-- name: rows
SELECT count(*) FROM approval;

-- name: open_of_owner
SELECT count(*) FROM approval WHERE owner = :owner AND state IN ('pending', 'granted');

-- name: ask
INSERT INTO approval (id, owner, agent, tenant, tool, arguments, policy, rule, expires, nonce,
  binding, state, reason, call, requested)
VALUES (:id, :owner, :agent, :tenant, :tool, :arguments, :policy, :rule, :expires, :nonce,
  :binding, 'pending', :reason, :call, :now);

-- name: grants
SELECT approver, signature, note, at FROM approval_grant WHERE approval = :id ORDER BY at, approver;

-- name: grant
INSERT INTO approval_grant (approval, approver, signature, note, at)
VALUES (:id, :approver, :signature, :note, :now);

-- name: decide
UPDATE approval SET state = :state, decided = :now, approver = :approver, signature = :signature,
  note = :note, finished = CASE WHEN :state = 'denied' THEN :now ELSE 0 END
WHERE id = :id AND state = 'pending';

-- name: use
UPDATE approval SET state = 'used', used = :now, call = :call, finished = :now
WHERE id = :id AND state = 'granted';

-- name: finish
UPDATE approval SET state = :state, finished = :now, note = :note
WHERE id = :id AND state IN ('pending', 'granted');

-- name: overdue
SELECT * FROM approval WHERE state IN ('pending', 'granted') AND expires <= :now
ORDER BY expires LIMIT :limit;

-- name: listing
SELECT * FROM approval WHERE seq > :after AND (:state = '' OR state = :state)
ORDER BY seq LIMIT :limit;

-- name: prune
DELETE FROM approval WHERE id IN (
  SELECT id FROM approval WHERE finished > 0 AND finished < :before ORDER BY finished
  LIMIT :limit);

-- name: counts
SELECT state, count(*) FROM approval GROUP BY state;
