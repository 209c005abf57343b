"""Drafters: anything that proposes tokens. One file a method; ``registry`` turns a spec string into one."""
