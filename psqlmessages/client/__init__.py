"""The Python client: psycopg only, no Django; usable in scripts and on Spark executors."""
