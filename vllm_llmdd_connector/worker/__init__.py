"""Worker side: registration, links, pulls, releases. One instance per rank."""
