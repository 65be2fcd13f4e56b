"""The verbs that measure, one file each; `fathomlm.cli.main` names them, and imports them only when they are called."""
