"""What `bench.data_path` races: moves of rows, and attention over pages."""
