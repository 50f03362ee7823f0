#!/bin/sh
# Users of etcd, by the common name of their certificate: servers of experts (weft-server) write below weft/, trainers
# (weft-client) read there, and all others have no access. Run it once, with the certificate of the user root:
#     ETCDCTL="etcdctl --endpoints=https://etcd-0.etcd:2379 --cacert=ca.crt --cert=root.crt --key=root.key" sh etcd-users.sh
# In Kubernetes: ETCDCTL="kubectl exec -i etcd-0 -- etcdctl ..." with these files copied to where that can read them.
set -eu
etcdctl=${ETCDCTL:-etcdctl}

$etcdctl user add root --no-password
$etcdctl role add root
$etcdctl user grant-role root root

$etcdctl role add weft-server
$etcdctl role grant-permission weft-server --prefix=true readwrite weft/
$etcdctl user add weft-server --no-password
$etcdctl user grant-role weft-server weft-server

$etcdctl role add weft-client
$etcdctl role grant-permission weft-client --prefix=true read weft/
$etcdctl user add weft-client --no-password
$etcdctl user grant-role weft-client weft-client

$etcdctl auth enable
