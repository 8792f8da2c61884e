"""The archive: messages of topics in Parquet files."""
