"""The shipped configurations, installed as `mod_export_configs`. One TOML file is one named build."""
