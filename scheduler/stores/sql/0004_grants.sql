-- Signatures that grant an approval: as many as its rule wants make it granted. A denial is one, and
-- stands in the approval itself; so do grants of before this table was here.
CREATE TABLE approval_grant (
  approval  TEXT NOT NULL,
  approver  TEXT NOT NULL,
  signature BLOB NOT NULL,
  note      TEXT NOT NULL,
  at        INTEGER NOT NULL,
  PRIMARY KEY (approval, approver)
) WITHOUT ROWID;

CREATE TRIGGER approval_gone AFTER DELETE ON approval BEGIN
  DELETE FROM approval_grant WHERE approval = OLD.id;
END;
