-- The idempotency ledger. States and their legal changes stand in effects.py. Rows that are reserved
-- or in doubt are never pruned: they are the only trace of what may have happened.
CREATE TABLE effect (
  key      TEXT PRIMARY KEY,
  owner    TEXT NOT NULL,
  agent    TEXT NOT NULL,
  tenant   TEXT NOT NULL,
  tool     TEXT NOT NULL,
  kind     TEXT NOT NULL CHECK (kind IN ('read', 'idempotent', 'irreversible')),
  digest   TEXT NOT NULL,
  call     TEXT NOT NULL,
  state    TEXT NOT NULL CHECK (state IN ('reserved', 'settled', 'in_doubt')),
  epoch    INTEGER NOT NULL,
  reserved INTEGER NOT NULL,
  deadline INTEGER NOT NULL,
  keep     INTEGER NOT NULL,
  settled  INTEGER NOT NULL DEFAULT 0,
  expires  INTEGER NOT NULL DEFAULT 0,
  note     TEXT NOT NULL DEFAULT '',
  tokens   INTEGER NOT NULL DEFAULT 0,
  bytes    INTEGER NOT NULL DEFAULT 0,
  result   BLOB
);

CREATE INDEX effect_reserved ON effect (deadline) WHERE state = 'reserved';
CREATE INDEX effect_doubt ON effect (reserved) WHERE state = 'in_doubt';
CREATE INDEX effect_expires ON effect (expires) WHERE state = 'settled';

CREATE TABLE effect_total (
  one   INTEGER PRIMARY KEY CHECK (one = 1),
  rows  INTEGER NOT NULL,
  bytes INTEGER NOT NULL
);

INSERT INTO effect_total VALUES (1, 0, 0);

CREATE TRIGGER effect_added AFTER INSERT ON effect BEGIN
  UPDATE effect_total SET rows = rows + 1, bytes = bytes + NEW.bytes;
END;

CREATE TRIGGER effect_removed AFTER DELETE ON effect BEGIN
  UPDATE effect_total SET rows = rows - 1, bytes = bytes - OLD.bytes;
END;

CREATE TRIGGER effect_resized AFTER UPDATE OF bytes ON effect BEGIN
  UPDATE effect_total SET bytes = bytes + NEW.bytes - OLD.bytes;
END;

-- Consent to single calls. States stand in approvals.py; what was signed never changes, and a final
-- state is final, whoever asks.
CREATE TABLE approval (
  seq       INTEGER PRIMARY KEY AUTOINCREMENT,
  id        TEXT NOT NULL UNIQUE,
  owner     TEXT NOT NULL,
  agent     TEXT NOT NULL,
  tenant    TEXT NOT NULL,
  tool      TEXT NOT NULL,
  arguments TEXT NOT NULL,
  policy    TEXT NOT NULL,
  rule      TEXT NOT NULL,
  expires   INTEGER NOT NULL,
  nonce     TEXT NOT NULL,
  binding   TEXT NOT NULL,
  state     TEXT NOT NULL CHECK (state IN
            ('pending', 'granted', 'used', 'denied', 'expired', 'void')),
  reason    TEXT NOT NULL,
  call      TEXT NOT NULL,
  requested INTEGER NOT NULL,
  decided   INTEGER NOT NULL DEFAULT 0,
  used      INTEGER NOT NULL DEFAULT 0,
  finished  INTEGER NOT NULL DEFAULT 0,
  approver  TEXT NOT NULL DEFAULT '',
  signature BLOB NOT NULL DEFAULT x'',
  note      TEXT NOT NULL DEFAULT ''
);

CREATE INDEX approval_binding ON approval (binding, seq);
CREATE INDEX approval_open ON approval (expires) WHERE state IN ('pending', 'granted');
CREATE INDEX approval_owner ON approval (owner, seq) WHERE state IN ('pending', 'granted');
CREATE INDEX approval_finished ON approval (finished) WHERE finished > 0;

CREATE TRIGGER approval_final BEFORE UPDATE OF state ON approval
WHEN OLD.finished > 0 AND NEW.state <> OLD.state BEGIN
  SELECT RAISE (ABORT, 'a final approval does not change');
END;

CREATE TRIGGER approval_signed BEFORE UPDATE OF
  owner, agent, tenant, tool, arguments, policy, rule, expires, nonce, binding ON approval BEGIN
  SELECT RAISE (ABORT, 'what is signed does not change');
END;
