"""The archive: stored messages of topics as Parquet files."""
