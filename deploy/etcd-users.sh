#!/bin/sh
# Users of etcd, by the common name of their certificate: servers of experts (torchweft-server) write below torchweft/,
# trainers (torchweft-client) read there, and all others have no access. Run it with the certificate of the user root:
#     ETCDCTL="etcdctl --endpoints=https://etcd-0.etcd:2379 --cacert=ca.crt --cert=root.crt --key=root.key" sh etcd-users.sh
# In Kubernetes: through `kubectl port-forward etcd-0 2379`, with --endpoints=https://localhost:2379.
# A repeated run changes nothing, and finishes one that was interrupted.
set -eu
etcdctl=${ETCDCTL:-etcdctl}

# Runs etcdctl, and accepts that the user or role exists already. etcd itself accepts every other repetition.
ensure() {
    if ! output=$($etcdctl "$@" 2>&1); then
        case $output in
        *"already exists"*) output="$* exists already" ;;
        *)
            echo "etcd-users.sh: etcdctl $*: $output" >&2
            exit 1
            ;;
        esac
    fi
    echo "$output"
}

ensure user add root --no-password
ensure role add root
ensure user grant-role root root

ensure role add torchweft-server
ensure role grant-permission torchweft-server --prefix=true readwrite torchweft/
ensure user add torchweft-server --no-password
ensure user grant-role torchweft-server torchweft-server

ensure role add torchweft-client
ensure role grant-permission torchweft-client --prefix=true read torchweft/
ensure user add torchweft-client --no-password
ensure user grant-role torchweft-client torchweft-client

ensure auth enable
