#!/usr/bin/env bash
# Two nodes of Ray on this machine, with a link between them of the rate that is given: `scripts/two_nodes.sh 50mbit COMMAND...`
# runs COMMAND in the head's network with RAY_ADDRESS set, so that cluster.address=auto finds both. The node with the CPUs is the
# other one: rollout actors that reserve one (cluster.rollout_cpus=1) run there. Needs root and iproute2; a network of its own,
# called vla_rl_node, is made and taken away.
set -euo pipefail

rate=$1
shift
bin=$(dirname "$(command -v ray || echo .venv/bin/ray)")
head=10.231.0.1 other=10.231.0.2 space=vla_rl_node link=vla_rl_link
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN RAY_USAGE_STATS_ENABLED=0 RAY_prestart_worker_first_driver=0
RAY_AUTH_TOKEN=$(python3 -c 'import secrets; print(secrets.token_hex(32))')
temporary=$(mktemp -d /tmp/nodes.XXXX)

end() {
    for pid in $(ip netns pids "$space" 2>/dev/null) $(pgrep -f -- "$temporary/|=$head:6391" || true); do
        kill -9 "$pid" 2>/dev/null || true
    done
    ip link del "$link" 2>/dev/null || true
    ip netns del "$space" 2>/dev/null || true
    rm -rf "$temporary" "$temporary.log"
}
trap end EXIT

ip netns add "$space"
ip link add "$link" type veth peer name node netns "$space"
ip addr add "$head/24" dev "$link"
ip link set "$link" up
ip netns exec "$space" sh -c "ip addr add $other/24 dev node && ip link set node up && ip link set lo up"
for shaped in "" "ip netns exec $space"; do
    $shaped tc qdisc add dev "$([ -z "$shaped" ] && echo "$link" || echo node)" root tbf rate "$rate" burst 64kbit latency 400ms
done
"$bin/ray" start --head --node-ip-address="$head" --port=6391 --num-cpus=0 --include-dashboard=false --temp-dir="$temporary" \
    --object-store-memory=500000000 >"$temporary.log" 2>&1 || { cat "$temporary.log" && exit 1; }
ip netns exec "$space" "$bin/ray" start --address="$head:6391" --node-ip-address="$other" --num-cpus=4 \
    --object-store-memory=500000000 >"$temporary.log" 2>&1 || { cat "$temporary.log" && exit 1; }
RAY_ADDRESS="$head:6391" "$@"
