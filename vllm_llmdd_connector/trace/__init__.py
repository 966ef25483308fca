"""The picture of a transfer: what each process records, and the program that puts it together.

Recording (``recorder``, ``clock``) is option ``trace_dir`` and part of the servers; everything else
is read by people: ``python -m vllm_llmdd_connector.trace``. docs/tracing.md names all events.
"""
