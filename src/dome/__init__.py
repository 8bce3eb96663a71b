"""DOME: removes nuisance directions from stochastic gradients."""
