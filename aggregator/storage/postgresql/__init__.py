"""The tables in PostgreSQL: a connection, a fleet's schema, and the lock of the program that leads."""
