-- What was spent of a calendar's amount (a budget, a provider's requests per day), by pool and
-- period, in micro-units. A restart must neither give a budget anew nor take it away.
CREATE TABLE usage (
  pool     TEXT NOT NULL,
  unit     TEXT NOT NULL,
  calendar TEXT NOT NULL,
  start    INTEGER NOT NULL,
  until    INTEGER NOT NULL,
  used     INTEGER NOT NULL CHECK (used >= 0),
  PRIMARY KEY (pool, unit, calendar, start)
);

CREATE INDEX usage_until ON usage (until);
