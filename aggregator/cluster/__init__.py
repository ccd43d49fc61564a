"""Past one machine: tables in PostgreSQL and a standby, blobs in an object store, and jobs on a Ray cluster."""
