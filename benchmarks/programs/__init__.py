"""Programs that the benchmarks start, besides the trainers."""
