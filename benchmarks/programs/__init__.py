"""What benchmarks start beside the trainers."""
