"""Virtual-time simulation around the production decisions."""
