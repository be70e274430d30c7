# In the guest that is only a client, another host: it is killed.
mkdir -p /nl /n4
mount -t nfs -o vers=3,nolock 10.0.2.1:/srv/x /nl; mount -t nfs -o vers=4.2 10.0.2.1:/x /n4
mount | grep ' nfs'
