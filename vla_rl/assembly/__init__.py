"""The parts of a run, made from its config: folder, env, policy, reward, learner."""
