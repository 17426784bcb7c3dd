-- Optional, beside joulery schedule: adds what users omit at submission, and rejects jobs that cannot run.
-- Put it beside slurm.conf and set JobSubmitPlugins=lua. joulery works without it.

local PARTITIONS = {}        -- partitions that joulery schedules, such as {gpu = true}; all when empty
local MOST_GPUS = 0          -- GPUs of the cluster; jobs that request more are rejected; 0 lets them wait
local HOLD = false           -- hold jobs until the daemon has ranked them; only if the daemon is supervised

local NO_REQUEUE, APPEND = 0, 2

local function ours(job)
   if next(PARTITIONS) == nil then return true end
   for name in string.gmatch(job.partition or "", "[^,]+") do
      if PARTITIONS[name] then return true end
   end
   return false
end

local function count(tres)
   local total = 0
   for part in string.gmatch(tres or "", "[^,]+") do
      if string.find(part, "gpu", 1, true) then
         total = total + (tonumber(string.match(part, "[:=](%d+)$")) or 1)
      end
   end
   return total
end

local function is_number(value)
   return value ~= nil and value > 0 and value ~= slurm.NO_VAL and value ~= slurm.NO_VAL16 and value ~= slurm.NO_VAL64
end

local function gpus_of(job)
   local nodes, tasks = 1, 1
   if is_number(job.min_nodes) then nodes = job.min_nodes end
   if is_number(job.num_tasks) then tasks = job.num_tasks end
   local whole = count(job.tres_per_job)
   if whole > 0 then return whole end
   local each = count(job.tres_per_node)
   if each > 0 then return each * nodes end
   return count(job.tres_per_task) * tasks
end

function slurm_job_submit(job, partitions, user)
   local gpus = gpus_of(job)
   if gpus == 0 or job.script == nil or job.array_inx ~= nil or not ours(job) then
      return slurm.SUCCESS  -- no GPU, interactive, an array, or of another partition: left alone
   end
   if MOST_GPUS > 0 and gpus > MOST_GPUS then
      slurm.log_user("this job asks for %d GPUs, the cluster has %d", gpus, MOST_GPUS)
      return slurm.ERROR
   end
   local comment = job.comment or ""
   local range = string.match(comment, "joulery:(%S*)")
   if range == nil then
      local said = "joulery:min=" .. gpus .. ",max=" .. gpus
      job.comment = comment == "" and said or comment .. " " .. said
   else
      local low = tonumber(string.match(range, "min=(%d+)") or "1")
      local high = tonumber(string.match(range, "max=(%d+)") or tostring(gpus))
      if low == nil or high == nil or low < 1 or low > gpus or gpus > high then
         slurm.log_user("--comment=joulery:%s does not hold the %d GPUs that the job asks for", range, gpus)
         return slurm.ERROR
      end
      if MOST_GPUS > 0 and low > MOST_GPUS then
         slurm.log_user("--comment=joulery:%s needs more than the %d GPUs there are", range, MOST_GPUS)
         return slurm.ERROR
      end
   end
   if job.requeue ~= NO_REQUEUE then job.requeue = 1 end  -- an explicit --no-requeue stays
   job.open_mode = APPEND
   if HOLD and job.requeue ~= NO_REQUEUE then
      job.admin_comment = "green:held"
      job.priority = 0
   end
   return slurm.SUCCESS
end

function slurm_job_modify(job, record, partitions, user)
   return slurm.SUCCESS
end
