#!/bin/bash
# In the place of docker: records what it was called with, and runs commands on this machine, in a folder for each container.
# Its state is in the folder FAKE_DOCKER. Words of a call end with NUL, calls with a line feed after it.
printf '%s\0' "$@" >> "$FAKE_DOCKER/calls"
printf '\n' >> "$FAKE_DOCKER/calls"

kill_all() {
    for group in "$1"/groups/*; do
        [ -e "$group" ] && kill -9 -- "-${group##*/}" 2> /dev/null
    done
}

verb=$1
shift
case $verb in
run)
    while [ $# -gt 1 ]; do
        [ "$1" = --name ] && name=$2
        [ "$1" = --label ] && owner=${2#*=}
        shift
    done
    mkdir -p "$FAKE_DOCKER/$name/scratch" "$FAKE_DOCKER/$name/groups"
    echo "$owner" > "$FAKE_DOCKER/$name/owner"
    ;;
exec)
    [ "$1" = --interactive ] && shift
    folder=$FAKE_DOCKER/$1
    shift
    cd "$folder/scratch" 2> /dev/null || { echo "Error response from daemon: No such container: ${folder##*/}"; exit 1; }
    [ "$*" = "sh -c kill -9 -1" ] && { kill_all "$folder"; exit 137; }
    exec 3<&0
    setsid "${@//\/scratch/$folder/scratch}" <&3 &
    touch "$folder/groups/$!"
    wait $!
    code=$?
    kill -0 -- "-$!" 2> /dev/null || rm -f "$folder/groups/$!"
    exit $code
    ;;
inspect)
    [ -d "$FAKE_DOCKER/${*: -1}" ] && echo true
    ;;
ps)
    for owner in "$FAKE_DOCKER"/*/owner; do
        folder=${owner%/owner}
        [ -e "$owner" ] && echo "${folder##*/} $(cat "$owner")"
    done
    ;;
rm)
    shift
    for name in "$@"; do
        kill_all "$FAKE_DOCKER/$name"
        rm -rf "${FAKE_DOCKER:?}/$name"
    done
    ;;
esac
