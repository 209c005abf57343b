"""Measuring and explaining: benchmarks, comparisons, prompts, theory, traces."""
