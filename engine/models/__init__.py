"""Models: turning what is published into the Hugging Face folder that a build is made from."""
