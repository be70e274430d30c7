# In the guest that is the NFS server and some of its clients: file systems in memory, mounts, exports.
mkdir -p /run/rpc_pipefs /var/lib/nfs/{rpc_pipefs,nfsdcld,v4recovery}
mount -t tmpfs tmpfs /srv; chmod 755 /srv
make() {  # NAME SIZE TYPE: a file system at /srv/NAME
    truncate -s "$2" "/run/$1.img"; mkdir -p "/srv/$1"
    if [ "$3" = xfs ]; then mkfs.xfs -q "/run/$1.img"; else mkfs.ext4 -qF "/run/$1.img"; fi
    mount -o loop "/run/$1.img" "/srv/$1" && chmod 777 "/srv/$1"
}
make x 300M ext4; make small 24M ext4; make xfs 320M xfs
mount -t nfsd nfsd /proc/fs/nfsd; mount -t rpc_pipefs rpc /run/rpc_pipefs
rpcbind -w; rpc.statd --no-notify; nfsdcld
cat > /etc/exports <<'X'
/srv *(ro,no_subtree_check,fsid=0,insecure)
/srv/x *(rw,no_root_squash,no_subtree_check,fsid=1,insecure)
/srv/small *(rw,no_root_squash,no_subtree_check,fsid=2,insecure)
/srv/xfs *(rw,root_squash,no_subtree_check,fsid=3,insecure)
X
exportfs -ra; rpc.nfsd -G 15 -L 60 4; rpc.mountd; sleep 1
mounted() {  # FOLDER OPTIONS EXPORT: of version 4, names begin at the root of what is exported
    mkdir -p "$1"; mount -t nfs -o "$2" "127.0.0.1:$3" "$1" || exit 1
}
mounted /nl vers=3,nolock /srv/x; mounted /n3 vers=3,nosharecache /srv/x; mounted /n4 vers=4.2 /x
mounted /small3 vers=3 /srv/small; mounted /small4.2 vers=4.2 /small
mounted /squash3 vers=3 /srv/xfs; mounted /squash4.2 vers=4.2 /xfs
touch /host-rw/server-is-up
