#!/bin/sh
# Users of etcd, by the common name of their certificate: servers of experts (torchweft-server) write below torchweft/,
# trainers (torchweft-client) read there, and all others have no access. Run it once, with the certificate of the user
# root:
#     ETCDCTL="etcdctl --endpoints=https://etcd-0.etcd:2379 --cacert=ca.crt --cert=root.crt --key=root.key" sh etcd-users.sh
# In Kubernetes: ETCDCTL="kubectl exec -i etcd-0 -- etcdctl ..." with these files copied to where that can read them.
set -eu
etcdctl=${ETCDCTL:-etcdctl}

$etcdctl user add root --no-password
$etcdctl role add root
$etcdctl user grant-role root root

$etcdctl role add torchweft-server
$etcdctl role grant-permission torchweft-server --prefix=true readwrite torchweft/
$etcdctl user add torchweft-server --no-password
$etcdctl user grant-role torchweft-server torchweft-server

$etcdctl role add torchweft-client
$etcdctl role grant-permission torchweft-client --prefix=true read torchweft/
$etcdctl user add torchweft-client --no-password
$etcdctl user grant-role torchweft-client torchweft-client

$etcdctl auth enable
