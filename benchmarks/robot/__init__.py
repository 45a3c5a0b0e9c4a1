"""Sessions with an arm that is simulated: processes killed, lateness, ways of acting, people."""
