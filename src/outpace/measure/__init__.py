"""Measuring and explaining: benchmarks, comparisons, predictions, prompts, traces."""
