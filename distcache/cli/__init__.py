"""What the entry points share: composing the configuration, processes, logs, tables, plots."""
