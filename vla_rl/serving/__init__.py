"""Policies over the wire: a server of openpi's protocol, and a policy that asks one."""
