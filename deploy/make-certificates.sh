#!/bin/sh
# Certificates for servers of experts and for their clients, signed by an authority of their own.
#     sh make-certificates.sh FOLDER server HOST [HOST ...]   server-HOST.key and server-HOST.crt, for these host names
#     sh make-certificates.sh FOLDER client NAME              client-NAME.key and client-NAME.crt, for this common name
# The first call makes the authority, ca.key and ca.crt. Servers and clients need ca.crt. ca.key stays where it is: its
# owner can make any certificate. A repeated call renews a certificate and keeps its key.
# Valid for $DAYS (365) days. The common name of servers is $COMMON_NAME (torchweft-server).
set -eu

fail() {
    echo "make-certificates.sh: $1" >&2
    exit 2
}

[ $# -ge 3 ] || fail "wanted FOLDER server HOST [HOST ...], or FOLDER client NAME"
folder=$1 role=$2 first=$3
shift 2
for name; do
    case $name in
    *[!A-Za-z0-9.:_-]* | -* | '') fail "the name '$name' has other characters than letters, digits and . : _ -" ;;
    esac
done
case $role in
server) common=${COMMON_NAME:-torchweft-server} uses=serverAuth,clientAuth purpose="sslserver sslclient" ;;
client)
    [ $# -eq 1 ] || fail "a client has one name, but these are $#: $*"
    common=$first uses=clientAuth purpose=sslclient
    ;;
*) fail "the role '$role' is neither server nor client" ;;
esac

umask 077 # keys are for their owner alone
mkdir -p "$folder"
cd "$folder"
draft=$(mktemp -d ./draft.XXXXXX)
trap 'rm -rf "$draft"' EXIT

new_key() { # FILE: made beside its place and renamed, so that an interrupted call leaves no half a key
    openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out "$draft/key" 2>"$draft/log" ||
        fail "openssl makes no key: $(cat "$draft/log")"
    mv "$draft/key" "$1"
}

settings() { # COMMON-NAME: a file for openssl, because the settings of the system differ
    printf '%s\n' '[req]' 'prompt = no' 'distinguished_name = name' '[name]' "CN = $1" '[extensions]'
}

if [ ! -f ca.crt ]; then
    [ ! -f ca.key ] || fail "there is ca.key and no ca.crt in $folder; move ca.key away for a new authority"
    new_key ca.key
    {
        settings "torchweft authority $(openssl rand -hex 4)" # unique, so that two authorities are not confused
        printf '%s\n' 'basicConstraints = critical, CA:TRUE, pathlen:0' 'keyUsage = critical, keyCertSign, cRLSign' \
            'subjectKeyIdentifier = hash'
    } >"$draft/ca.conf"
    openssl req -x509 -new -sha256 -key ca.key -config "$draft/ca.conf" -extensions extensions -days 3650 \
        -out "$draft/ca.crt"
    mv "$draft/ca.crt" ca.crt
    chmod 644 ca.crt
fi

file=$role-$first
[ -f "$file.key" ] || new_key "$file.key"
{
    settings "$common"
    printf '%s\n' 'basicConstraints = critical, CA:FALSE' 'keyUsage = critical, digitalSignature' \
        "extendedKeyUsage = $uses" 'subjectKeyIdentifier = hash' 'authorityKeyIdentifier = keyid'
    if [ "$role" = server ]; then
        printf '%s\n' 'subjectAltName = @hosts' '[hosts]'
        number=0
        for host; do
            number=$((number + 1))
            case $host in
            *[!0-9.]*) case $host in *:*) kind=IP ;; *) kind=DNS ;; esac ;;
            *) kind=IP ;;
            esac
            echo "$kind.$number = $host"
        done
    fi
} >"$draft/leaf.conf"
openssl req -new -sha256 -key "$file.key" -config "$draft/leaf.conf" -out "$draft/leaf.csr"
openssl x509 -req -sha256 -in "$draft/leaf.csr" -CA ca.crt -CAkey ca.key -set_serial "0x$(openssl rand -hex 16)" \
    -extfile "$draft/leaf.conf" -extensions extensions -days "${DAYS:-365}" -out "$draft/leaf.crt" 2>"$draft/log" ||
    fail "openssl signs no certificate for $file: $(cat "$draft/log")"

for use in $purpose; do
    openssl verify -CAfile ca.crt -purpose "$use" "$draft/leaf.crt" >/dev/null
done
mv "$draft/leaf.crt" "$file.crt"
chmod 644 "$file.crt"
echo "$folder/$file.crt: $common, until $(openssl x509 -noout -enddate -in "$file.crt" | cut -d= -f2)"
