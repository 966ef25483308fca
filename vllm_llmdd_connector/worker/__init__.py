"""Worker side: registration, links, pulls, lease confirmations. One instance per rank."""
