"""mod-export: turns a trained Mixture-of-Depths checkpoint into static, verified inference artefacts."""
