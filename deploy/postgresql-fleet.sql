-- A role and a database for one fleet; nothing of them can be read by the role of another fleet. As PostgreSQL's user:
--   psql -v fleet=orchard -f postgresql-fleet.sql && psql -c '\password orchard'
-- Then: aggregator run --store postgresql://orchard@db.example/orchard
CREATE ROLE :"fleet" LOGIN;
CREATE DATABASE :"fleet" OWNER :"fleet";
REVOKE ALL ON DATABASE :"fleet" FROM PUBLIC;
