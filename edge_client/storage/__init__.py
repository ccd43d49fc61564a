"""What a device keeps over a restart, in SQLite and files. Imports no other room but item types of `agent`."""
