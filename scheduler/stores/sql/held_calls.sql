-- name: keep
INSERT INTO held_call (id, owner, agent, tenant, rule, tier, model, dialect, family, client, target,
  coding, peer, streams, received, deadline, dedupe, digest, webhook, reason, because, bytes)
VALUES (:id, :owner, :agent, :tenant, :rule, :tier, :model, :dialect, :family, :client, :target,
  :coding, :peer, :streams, :received, :deadline, nullif(:dedupe, ''), :digest, :webhook, :reason,
  :because, :bytes);

-- name: keep_body
INSERT INTO held_body (id, part, status, headers, body)
VALUES (:id, :part, :status, :headers, :body);

-- name: totals
SELECT calls, bytes FROM held_total;

-- name: live_of_owner
SELECT count(*) FROM held_call WHERE owner = :owner AND finished = 0;

-- name: by_key
SELECT * FROM held_call WHERE dedupe = :dedupe;

-- name: by_id
SELECT * FROM held_call WHERE id = :id;

-- name: next_open
SELECT id, bytes FROM held_call
WHERE state = 'open' AND model = :model AND not_before <= :now AND deadline > :now
ORDER BY tier, seq LIMIT :limit;

-- name: claim
UPDATE held_call SET state = 'claimed', epoch = epoch + 1 WHERE id = :id AND state = 'open';

-- name: body
SELECT status, headers, body FROM held_body WHERE id = :id AND part = :part;

-- name: sending
UPDATE held_call SET state = 'sending', attempt = attempt + 1, sent_at = :now, sent_to = :to
WHERE id = :id AND epoch = :epoch AND state IN ('claimed', 'sending');

-- name: give_back
UPDATE held_call SET state = 'open', reason = :reason, not_before = :not_before,
  tries = tries + :tries
WHERE id = :id AND epoch = :epoch AND state IN ('claimed', 'sending');

-- name: finish
UPDATE held_call SET state = :state, status = :status, code = :code, message = :message,
  finished = :now, bytes = :bytes, not_before = 0,
  push_at = CASE WHEN webhook <> '' THEN :now ELSE 0 END,
  push_state = CASE WHEN webhook <> '' THEN 'pending' ELSE '' END
WHERE id = :id AND epoch = :epoch;

-- name: drop_request
DELETE FROM held_body WHERE id = :id AND part = 'request';

-- name: forget
DELETE FROM held_call WHERE id = :id;

-- name: overdue
SELECT * FROM held_call WHERE state = 'open' AND deadline <= :now ORDER BY deadline LIMIT :limit;

-- name: busy
SELECT * FROM held_call WHERE state IN ('claimed', 'sending') ORDER BY seq;

-- name: reopen
UPDATE held_call SET state = 'open' WHERE state = 'claimed';

-- name: prune
DELETE FROM held_call WHERE id IN (
  SELECT id FROM held_call WHERE finished > 0 AND finished < :before AND push_at = 0
  ORDER BY finished LIMIT :limit);

-- name: listing
SELECT * FROM held_call WHERE owner = :owner AND seq > :after ORDER BY seq LIMIT :limit;

-- name: waiting
SELECT model, tier, count(*), min(received), min(not_before) FROM held_call
WHERE state = 'open' GROUP BY model, tier ORDER BY tier, min(seq);

-- name: counts
SELECT state, count(*) FROM held_call GROUP BY state;

-- name: due_pushes
SELECT * FROM held_call WHERE push_at > 0 AND push_at <= :now ORDER BY push_at LIMIT :limit;

-- name: pushed
UPDATE held_call SET push_state = :state, push_at = :next_at, push_tries = push_tries + 1
WHERE id = :id AND finished > 0;
