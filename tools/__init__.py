"""The step from book to package: chapters/ to nbs/ to src/octavo/, and the gates that keep them equal."""
