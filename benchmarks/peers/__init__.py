"""Outpace beside llama.cpp and OpenVINO GenAI: the same file, prompts and limits, in one run."""
