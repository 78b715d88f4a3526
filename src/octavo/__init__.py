"""Generated: the chapters below it fill this package."""
