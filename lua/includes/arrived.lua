-- arrived(epochs, epoch): tells the head of an epoch that a request is in the queue, or that none
-- will follow: "ARRIVED" among what it is told to be ready. Until it has found the queue empty
-- (admit) it is not told again; "<epochs>:<epoch>:arrived" says that it was. `epochs` is the
-- prefix of the keys of an epoch, as of new_epoch.
local function arrived(epochs, epoch)
  local prefix = epochs .. ':' .. epoch
  if redis.call('SETNX', prefix .. ':arrived', 1) == 1 then
    redis.call('RPUSH', prefix .. ':ready:0', 'ARRIVED')
  end
end
