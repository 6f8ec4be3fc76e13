-- No STRICT tables: SQLite 3.34 is what some systems have beneath Python 3.11.
--
-- Calls kept until a breaker closes. States and their legal changes stand in holds.py; the trigger
-- refuses leaving a final state, whoever asks. Bodies have a table of their own, so that the rows
-- that are scanned stay small.
CREATE TABLE held_call (
  seq        INTEGER PRIMARY KEY AUTOINCREMENT,
  id         TEXT NOT NULL UNIQUE,
  owner      TEXT NOT NULL,
  agent      TEXT NOT NULL,
  tenant     TEXT NOT NULL,
  rule       TEXT NOT NULL,
  tier       INTEGER NOT NULL CHECK (tier BETWEEN 1 AND 3),
  model      TEXT NOT NULL,
  dialect    TEXT NOT NULL,
  family     TEXT NOT NULL,
  client     TEXT NOT NULL,
  target     BLOB NOT NULL,
  coding     TEXT NOT NULL,
  peer       TEXT NOT NULL,
  streams    INTEGER NOT NULL,
  received   INTEGER NOT NULL,
  deadline   INTEGER NOT NULL,
  dedupe     TEXT,
  digest     TEXT NOT NULL,
  webhook    TEXT NOT NULL,
  reason     TEXT NOT NULL,
  because    TEXT NOT NULL,
  state      TEXT NOT NULL DEFAULT 'open' CHECK (state IN
             ('open', 'claimed', 'sending', 'done', 'refused', 'expired', 'cancelled', 'in_doubt')),
  epoch      INTEGER NOT NULL DEFAULT 0,
  attempt    INTEGER NOT NULL DEFAULT 0,
  sent_at    INTEGER NOT NULL DEFAULT 0,
  sent_to    TEXT NOT NULL DEFAULT '',
  tries      INTEGER NOT NULL DEFAULT 0,
  not_before INTEGER NOT NULL DEFAULT 0,
  status     INTEGER NOT NULL DEFAULT 0,
  code       TEXT NOT NULL DEFAULT '',
  message    TEXT NOT NULL DEFAULT '',
  finished   INTEGER NOT NULL DEFAULT 0,
  push_at    INTEGER NOT NULL DEFAULT 0,
  push_tries INTEGER NOT NULL DEFAULT 0,
  push_state TEXT NOT NULL DEFAULT '' CHECK (push_state IN ('', 'pending', 'delivered', 'failed')),
  bytes      INTEGER NOT NULL
);

CREATE INDEX held_call_open ON held_call (model, tier, seq) WHERE state = 'open';
CREATE INDEX held_call_deadline ON held_call (deadline) WHERE state = 'open';
CREATE INDEX held_call_busy ON held_call (state) WHERE state IN ('claimed', 'sending');
CREATE INDEX held_call_owner ON held_call (owner, seq);
CREATE UNIQUE INDEX held_call_key ON held_call (dedupe) WHERE dedupe IS NOT NULL;
CREATE INDEX held_call_finished ON held_call (finished) WHERE finished > 0;
CREATE INDEX held_call_push ON held_call (push_at) WHERE push_at > 0;

CREATE TABLE held_body (
  id      TEXT NOT NULL REFERENCES held_call (id) ON DELETE CASCADE,
  part    TEXT NOT NULL CHECK (part IN ('request', 'reply')),
  status  INTEGER NOT NULL,
  headers TEXT NOT NULL,
  body    BLOB NOT NULL,
  PRIMARY KEY (id, part)
);

CREATE TABLE held_total (
  one   INTEGER PRIMARY KEY CHECK (one = 1),
  calls INTEGER NOT NULL,
  bytes INTEGER NOT NULL
);

INSERT INTO held_total VALUES (1, 0, 0);

CREATE TRIGGER held_call_added AFTER INSERT ON held_call BEGIN
  UPDATE held_total SET calls = calls + 1, bytes = bytes + NEW.bytes;
END;

CREATE TRIGGER held_call_removed AFTER DELETE ON held_call BEGIN
  UPDATE held_total SET calls = calls - 1, bytes = bytes - OLD.bytes;
END;

CREATE TRIGGER held_call_resized AFTER UPDATE OF bytes ON held_call BEGIN
  UPDATE held_total SET bytes = bytes + NEW.bytes - OLD.bytes;
END;

CREATE TRIGGER held_call_final BEFORE UPDATE OF state ON held_call
WHEN OLD.finished > 0 AND NEW.state <> OLD.state BEGIN
  SELECT RAISE (ABORT, 'a final hold does not change');
END;
