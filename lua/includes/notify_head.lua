-- notify_head(epochs, epoch): notifies the head of an epoch that a request is in the queue, or that
-- no further one will be added, by an entry "ARRIVED" in its ready list. The head is not notified
-- again until it has read the queue (admit); "<epochs>:<epoch>:arrived" exists until then.
-- `epochs` is the prefix of the keys of an epoch, as of new_epoch.
local function notify_head(epochs, epoch)
  local prefix = epochs .. ':' .. epoch
  if redis.call('SETNX', prefix .. ':arrived', 1) == 1 then
    redis.call('RPUSH', prefix .. ':ready:0', 'ARRIVED')
  end
end
