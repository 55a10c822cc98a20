"""Text from a build folder, token by token: prompts and steps on its engines, with numpy and an engine library."""
